import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** A tool loop with the JDK's HTTP client and its defaults, which offer an upgrade to HTTP/2: the task is the argument. */
class Loop {
    static final String TOOL = "{\"type\":\"function\",\"function\":{\"name\":\"read_file\",\"description\":\"Show a file\","
        + "\"parameters\":{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\"}},\"required\":[\"path\"]}}}";

    public static void main(String[] arguments) throws Exception {
        var client = HttpClient.newHttpClient();
        var url = URI.create(System.getenv("OPENAI_BASE_URL") + "/chat/completions");
        var messages = "{\"role\":\"user\",\"content\":\"" + arguments[0] + "\"}";
        for (int turn = 0; turn < 8; turn++) {
            var body = "{\"model\":\"jaxserve-demo\",\"messages\":[" + messages + "],\"tools\":[" + TOOL + "]}";
            var request = HttpRequest.newBuilder(url).header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(body)).build();
            var response = client.send(request, HttpResponse.BodyHandlers.ofString());
            if (response.statusCode() != 200) throw new IllegalStateException(response.statusCode() + " " + response.body());
            var path = find("\\\\\"path\\\\\": *\\\\\"(.*?)\\\\\"", response.body());
            if (path == null) {
                System.out.println(find("\"content\": *\"(.*?)\"", response.body()));
                return;
            }
            var id = find("\"id\": *\"(call_.*?)\"", response.body());
            messages += ",{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"" + id + "\",\"type\":\"function\","
                + "\"function\":{\"name\":\"read_file\",\"arguments\":\"{\\\"path\\\": \\\"" + path + "\\\"}\"}}]}"
                + ",{\"role\":\"tool\",\"tool_call_id\":\"" + id + "\",\"content\":\""
                + Files.readString(Path.of(path)).replace("\n", "\\n") + "\"}";
        }
    }

    static String find(String pattern, String text) {
        Matcher found = Pattern.compile(pattern).matcher(text);
        return found.find() ? found.group(1) : null;
    }
}
