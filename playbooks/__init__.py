"""One Markdown file a symptom; its front matter is the rule the doctor runs."""
