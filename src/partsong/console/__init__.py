"""What all commands share: output, errors, exit codes, and a few options."""
