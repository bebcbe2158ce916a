"""Many uploads to one."""
