"""Network safety shared by the services: HTTP server limits, request checks, egress rules, open files. Independent of
any service.
"""
