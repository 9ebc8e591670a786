"""`torch.distributed` backend "geartrain": process group, options, GPU staging, recovery from lost reducers."""
