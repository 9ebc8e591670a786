"""Dataset readers, one file a format."""
