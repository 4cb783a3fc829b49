"""What a deployment is doing now, read from its server without changing it.

Used by `top`, `doctor` and `demo`.
"""
