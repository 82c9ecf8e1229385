"""Methods that join clients' adapters on the server, one file each."""
