"""The configuration as frozen values: `service` (user_config), `api` and `model` (args), `deploy` (the file)."""
