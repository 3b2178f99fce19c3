"""Files that appear whole or not at all, and errors of ours where one cannot be read.

What a file holds is known to the room that writes it, not to this one. Any room may use it; it imports only `errors`.
"""
