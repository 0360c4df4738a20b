"""The theory of attention as a program: closed forms, each derived where it stands and tested against samples."""
