"""Pictures, clips and sound from files that strangers wrote: what their headers tell, and what they hold."""
