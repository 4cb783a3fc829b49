"""The commands and their options, by what they are for. Each imports what it does when it is called.

What a command does belongs to the modules and folders beside this one.
"""
