"""What `ServeConfig` is made of: fields, objectives, speculation, and names that other engines use."""
