"""`torch.distributed` backend "geartrain": process group, options, GPU staging."""

from geartrain.core.extras import require_torch

require_torch('the backend "geartrain" of torch.distributed')
