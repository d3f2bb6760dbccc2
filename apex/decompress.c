/* Decompresses the frames of a batch, each into its place or its two places, in one call.
 *
 * LZ4 itself is liblz4's: the caller passes its LZ4_decompress_safe. What is here is the loop around it, which from
 * Python costs two thirds of the decompression itself (docs/performance.md). Built at installation where there is a C
 * compiler; apex/blocks.py does the same without.
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
