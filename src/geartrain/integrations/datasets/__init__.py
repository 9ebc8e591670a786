"""Dataset importers and exporters, one file for each format."""
