"""What stands between a service and the network: bounds of its HTTP server, checks of requests, open files. It knows no
service."""
