"""The configuration as frozen values: `deploy` (config.yaml), `service` (user_config), `api`, `model` and `images`
(args).
"""
