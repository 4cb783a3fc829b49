"""What all services share: the FastStream app around a service, its pages, metrics and logs. No stage's rules."""
