"""`tokenbus top`: figures of the deployment, and the screen that shows them."""
