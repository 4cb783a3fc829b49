"""Parts of provider requests that several APIs share: conversation, participants, images, forms.

Each API builds its body in a room of its own.
"""
