"""The commands and their options, grouped by task. Each command imports its code when it is called.

The code of a command is in the modules and folders next to this one.
"""
