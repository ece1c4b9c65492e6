"""What every room may use: errors, the log, threads, and the small grammars and formats that several rooms read."""
