"""Networks: their layers, what goes in and comes out, and copies that are changed."""
