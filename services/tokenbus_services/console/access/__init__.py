"""Who looks at the console: logins, signed links, what a viewer may do, and what is hidden from those who may not read
content.
"""
