"""Chat templates for tests: the same, with generation blocks and without, and one that rewrites earlier turns."""

_TURN = (
    "<{{ m.role }}>{% if m.role == 'assistant' %}GENERATION{{ m.content }}</>END{% else %}{{ m.content }}</>{% endif %}"
)
_LOOP = (
    "{% for t in tools or [] %}<tool>{{ t.name }}</>{% endfor %}{% for m in messages %}"
    + _TURN
    + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

WITHOUT_BLOCKS = _LOOP.replace("GENERATION", "").replace("END", "")
WITH_BLOCKS = _LOOP.replace("GENERATION", "{% generation %}").replace("END", "{% endgeneration %}")
THAT_REWRITES = "{{ messages | length }}" + WITHOUT_BLOCKS
