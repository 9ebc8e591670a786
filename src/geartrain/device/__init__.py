"""Accelerators: streams and events, CUDA IPC, pinned host memory, NCCL, and the Triton kernels."""
