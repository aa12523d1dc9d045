"""Whole training steps: forward, loss, gradients and optimizer in one program."""
