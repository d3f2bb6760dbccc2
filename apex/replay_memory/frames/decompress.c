/* Decompresses the frames of a batch in one call: from an image, or straight from the replay memory.
 *
 * LZ4 itself is liblz4's: the caller passes its LZ4_decompress_safe. What is here is the loop around it, which from
 * Python costs two thirds of the decompression itself (docs/performance.md). Built at installation where there is a C
 * compiler; lz4_blocks.py does the same without.
 */
#include <stdint.h>
#include <string.h>

typedef int (*lz4_decompress)(const char *source, char *target, int source_bytes, int target_bytes);

/* image:   compressed frames; frame i is image[starts[i]] ... image[stops[i] - 1], checked by the caller to lie inside
 * places:  count x 2 places of frame_bytes each within target; a negative one is none
 * returns  the number of frames that were decompressed: below count, the next one is no frame
 */
int64_t apex_decompress(lz4_decompress decompress, const char *image, const int64_t *starts, const int64_t *stops,
                        const int64_t (*places)[2], int64_t count, char *target, int64_t frame_bytes)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t first = places[i][0], second = places[i][1];
        if (first < 0) {
            first = second;
            second = -1;
        }
        if (first < 0)
            continue;
        char *frame = target + first * frame_bytes;
        if (decompress(image + starts[i], frame, (int)(stops[i] - starts[i]), (int)frame_bytes) != frame_bytes)
            return i;
        if (second >= 0)
            memcpy(target + second * frame_bytes, frame, (size_t)frame_bytes); /* Now, while it is in the cache. */
    }
    return count;
}

#define MOST_FRAMES 255 /* of one transition */

/* One transition of the replay memory. Frames count from the first that it needs. */
struct stored {
    int64_t row;         /* of the stacks, that it goes to */
    int64_t image;       /* where its segment's image begins in the arena */
    int64_t first_frame; /* which of the segment's frames is its first */
    int64_t num_frames;
    int64_t frame, depth;           /* newest frame of s_t, and how many of its stack are real */
    int64_t next_frame, next_depth; /* of s_{t+m} */
};

struct memory {
    const char *arena;
    int64_t arena_bytes;
    int64_t max_frame_bytes; /* the most that a frame takes compressed */
    char *scratch;           /* MOST_FRAMES x max_frame_bytes */
};

struct stacks {
    char *rows; /* [2][batch][stack][frame_bytes] */
    int64_t batch, stack, frame_bytes;
};

/* Whether `value` is 0 ... `most`. */
static int within(int64_t value, int64_t most) { return value >= 0 && value <= most; }

/* Returns 1 if the transition came out; 0 if its frames are none: then its row may hold anything. */
static int decode_one(lz4_decompress decompress, const struct memory *memory, const struct stored *t,
                      const struct stacks *stacks)
{
    uint32_t table[MOST_FRAMES + 1];
    int64_t num = t->num_frames, size = stacks->frame_bytes, stack = stacks->stack, end = memory->arena_bytes;
    if (num < 1 || num > MOST_FRAMES || !within(t->depth, stack) || !within(t->next_depth, stack) ||
        !within(t->row, stacks->batch - 1) || !within(t->image, end) || !within(t->first_frame, end))
        return 0;
    int64_t begins = t->image + 4 * t->first_frame;
    if (begins + 4 * (num + 1) > end)
        return 0;
    memcpy(table, memory->arena + begins, (size_t)(4 * (num + 1)));
    int64_t first_byte = table[0], bytes = (int64_t)table[num] - first_byte;
    if (!within(bytes, num * memory->max_frame_bytes) || t->image + first_byte + bytes > end)
        return 0;
    memcpy(memory->scratch, memory->arena + t->image + first_byte, (size_t)bytes);

    char *now = stacks->rows + t->row * stack * size, *later = now + stacks->batch * stack * size;
    memset(now, 0, (size_t)((stack - t->depth) * size)); /* before the episode's first frame */
    memset(later, 0, (size_t)((stack - t->next_depth) * size));
    for (int64_t f = 0; f < num; f++) {
        int64_t start = (int64_t)table[f] - first_byte, stop = (int64_t)table[f + 1] - first_byte;
        int64_t age = t->frame - f, next_age = t->next_frame - f; /* counted back from the newest of the stack */
        char *first = age >= 0 && age < t->depth ? now + (stack - 1 - age) * size : NULL;
        char *second = next_age >= 0 && next_age < t->next_depth ? later + (stack - 1 - next_age) * size : NULL;
        char *place = first ? first : second;
        if (!place)
            continue;
        if (start < 0 || start > stop || stop > bytes ||
            decompress(memory->scratch + start, place, (int)(stop - start), (int)size) != size)
            return 0;
        if (first && second)
            memcpy(second, first, (size_t)size);
    }
    return 1;
}

/* Decodes transitions straight from the arena into rows of stacks; good[i] says whether transition i came out.
 *
 * The writer may overwrite the arena meanwhile, so whatever is read there may say anything: it is copied before it is
 * looked at, and checked. Whether it was overwritten is for the caller to find out afterwards.
 */
void apex_decode_stored(lz4_decompress decompress, const struct memory *memory, const struct stored *transitions,
                        int64_t count, const struct stacks *stacks, uint8_t *good)
{
    for (int64_t i = 0; i < count; i++)
        good[i] = (uint8_t)decode_one(decompress, memory, &transitions[i], stacks);
}

/* Of the functions' arguments: lz4_blocks.py takes no other, so that a file of an older installation is not called. */
const int64_t apex_interface = 2;

/* SHA-256 of this file, by setup.py; native.py compares it. */
#ifndef APEX_SOURCE
#define APEX_SOURCE ""
#endif
const char apex_source[65] = APEX_SOURCE;
