"""What every room stands on: errors that teach, bundled files, hashes, how a command runs."""
