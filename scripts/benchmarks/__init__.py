"""Speed and memory: kernels, other libraries, search steps, and the layers of mor."""
