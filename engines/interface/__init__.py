"""What a service sees of an engine: its protocol, its options, its errors. No torch."""
