"""Models: their sizes (`spec`), the descriptions of their weights (`layers`) and their pure functions (`registry`)."""
