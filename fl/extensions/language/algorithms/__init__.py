"""Methods whose server joins clients' adapters, one file each."""
