"""How the configuration is checked: options with their ranges, sections, refusals by name."""
