"""How smooth is a model, layer by layer? One walk through it, what reads it on the way, and the profile it gives."""
