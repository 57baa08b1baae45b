"""KV pools: their sizes, their scales, and page transfers between instances."""
