"""CUDA devices, by torch.cuda and the libraries beside it: all that batches and tensors in calls ask of them.

`CudaDevice` is a device that batches land on (geartrain.device); `CudaDriver` opens memory of one process in another,
for tensors in calls (geartrain.cuda_ipc). Importing this imports no torch.
"""

from geartrain.cuda.device import CudaDevice
from geartrain.cuda.driver import CudaDriver, Driver

__all__ = ["CudaDevice", "CudaDriver", "Driver"]
