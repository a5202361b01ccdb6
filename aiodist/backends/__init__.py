"""What moves the data: one module a transport, behind the contract of `base`."""
