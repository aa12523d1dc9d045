// Part of torch with CUDA only.
