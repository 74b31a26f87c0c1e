"""The papers' fine-tuning: its data, and the seven tasks it is judged by."""
