"""What recorded traffic would do on this machine, and what to change: `lorasrv plan`. Nothing here serves."""
