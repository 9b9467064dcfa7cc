"""What plugin authors and our own tests share. Needs the extra ``ucm-core[testing]``."""
