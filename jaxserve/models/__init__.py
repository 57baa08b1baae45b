"""Models as numbers (`spec`), as descriptions of their weights (`layers`), and as pure functions (`registry`)."""
