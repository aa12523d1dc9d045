"""A device model measured on this machine: two kinds of figures, kept on disk, read by every compilation.

The passes estimate times with a ``DeviceModel``. Two models are built in. ``calibrate`` times small programs and makes
a model; ``store`` keeps it for this device, driver and versions; compilations use only ``store.stored_model``::

    memory      a pointwise kernel: kernel_us + bytes / bandwidth_gbs
    products    a matrix product: flops / gflops, by element type
"""
