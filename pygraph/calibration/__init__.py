"""A device model measured on this machine: two kinds of figures, kept on disk, read by every compilation.

The passes weigh what they decide with a ``DeviceModel``. Two are built in. ``calibrate`` times small programs
and fills one in; ``store`` keeps it for this device, driver and versions; ``store.stored_model`` is all that
compilations use::

    memory      a pointwise kernel: kernel_us + bytes / bandwidth_gbs
    products    a matrix product: flops / gflops, by element type
"""
