"""What outlives a request: the registry of cached prefixes, tenants and their quotas, and the configuration in use."""
