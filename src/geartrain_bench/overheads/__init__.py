"""What a journal, reports and traces cost."""
