"""The `torch.distributed` backend "geartrain"."""
