"""How well a model does its work, beside how smooth its tokens are. This room stands above `explain`."""
