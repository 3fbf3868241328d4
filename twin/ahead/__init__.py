"""Looking ahead: what plans of worker counts would come to, by a small model of one worker's share of the demand."""
