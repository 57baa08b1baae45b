"""What a model needs and what a device has, on paper: no weights, no devices."""
