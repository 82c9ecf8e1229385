"""What wraps methods and local training: one file each, with its settings and an `EXTENSION`."""
