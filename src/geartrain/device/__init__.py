"""Accelerators: streams and events, CUDA IPC memory, pinned host memory, NCCL, and the Triton kernels."""
