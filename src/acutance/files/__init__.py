"""Files that appear whole or not at all. Any room may use them; they import nothing but errors."""
